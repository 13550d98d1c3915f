"""Fixed front ends look at one record by itself, and at public or simulated data."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from refusals import raises_code
from scipy import ndimage

import lamina
from lamina.signals.front_ends import (
    Directions,
    ImageCNN,
    Scattering2D,
    bounded,
    distorted,
    lead_features,
    median_beat,
    r_waves,
    rhythm_features,
    unit_norm,
)

RATE = 100


def strip(seconds: int = 10, every: float = 0.8, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """One lead with R waves of known place, T waves and a little noise."""
    t = np.arange(seconds * RATE) / RATE
    places = np.arange(0.5, seconds - 0.5, every)
    wave = sum(np.exp(-(((t - p) / 0.012) ** 2)) + 0.25 * np.exp(-(((t - p - 0.28) / 0.05) ** 2)) for p in places)
    return wave + 0.01 * np.random.default_rng(seed).normal(size=len(t)), np.round(places * RATE).astype(int)


def test_r_waves_are_found_where_they_are() -> None:
    lead, places = strip()
    found = r_waves(lead, rate=RATE)
    assert len(found) == len(places)
    assert np.abs(found - places).max() <= 1
    assert np.abs(r_waves(-lead, rate=RATE) - places).max() <= 1  # a lead that looks the other way


def test_the_median_beat_forgets_noise_and_knows_when_each_lead_was_recorded() -> None:
    lead, _ = strip()
    peaks = r_waves(lead, rate=RATE)
    whole = median_beat(np.stack([lead, 2 * lead]), peaks, rate=RATE)
    assert whole.shape == (2, 80)
    assert whole[0].argmax() == 30
    assert np.allclose(whole[1], 2 * whole[0])
    page = np.stack([lead[:250], lead[250:500]])
    parts = median_beat(page, peaks, rate=RATE, starts=[0, 250])
    assert np.abs(parts - whole[0]).max() < 0.06
    assert not median_beat(page, peaks[:0], rate=RATE).any()


def test_lead_and_rhythm_features() -> None:
    lead, _ = strip()
    beat = median_beat(lead[None], r_waves(lead, rate=RATE), rate=RATE)
    row = lead_features(beat[None], rate=RATE)
    assert row.shape == (1, 7)
    assert row[0, 0] == pytest.approx(1.0, abs=0.1)  # R
    assert row[0, 5] == pytest.approx(0.25, abs=0.05)  # T
    pulse = rhythm_features([r_waves(lead, rate=RATE), np.array([5])], rate=RATE)
    assert pulse[0] == pytest.approx([0.0, 0.0, 0.0], abs=0.02)
    assert not pulse[1].any()


def test_a_strip_that_is_none_is_refused() -> None:
    with raises_code("data.strip-not-valid"):
        r_waves(np.zeros((2, 500)), rate=RATE)
    with raises_code("data.strip-not-valid"):
        r_waves(np.full(500, np.nan), rate=RATE)


def test_rows_are_bounded_and_of_norm_one_each_by_itself() -> None:
    x = np.random.default_rng(0).normal(size=(5, 7)) * 10.0
    x[2] = 0.0
    assert np.abs(bounded(x)).max() <= 1
    norms = np.linalg.norm(unit_norm(x), axis=1)
    assert norms == pytest.approx([1, 1, 0, 1, 1])
    assert np.array_equal(unit_norm(x)[:1], unit_norm(x[:1]))


def test_directions_come_from_public_or_simulated_data_only() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 6)) * np.array([9.0, 4.0, 1.0, 0.1, 0.1, 0.1]) + 3.0
    turned = Directions.of(x, proxy="simulated: six numbers", count=3)
    assert turned(x).mean(0) == pytest.approx(np.zeros(3), abs=1e-9)
    assert turned(x).std(0) == pytest.approx([9.0, 4.0, 1.0], rel=0.1)
    assert Directions.of(x, proxy="public", count=3, whiten=1.0)(x).std(0) == pytest.approx(np.ones(3))
    assert np.allclose(turned(x[5:6]), turned(x)[5:6])  # nobody else's row counts
    for proxy in ("private", "patients", ""):
        with raises_code("data.directions-not-public"):
            Directions.of(x, proxy=proxy, count=3)
    with raises_code("data.directions-count"):
        Directions.of(x, proxy="public", count=7)


def test_scattering_is_the_convolution_that_it_says() -> None:
    """Against convolutions in space, wrapped round, of the reflected image with the filters' inverse transforms."""
    made = Scattering2D((16, 16), scales=2, angles=4)
    image = torch.rand(1, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    found = made(image)
    assert found.shape == (1, made.channels, 4, 4) == (1, 1 + 8 + 16, 4, 4)
    padded = np.pad(image[0, 0].double().numpy(), 4, mode="reflect")
    u, v = np.meshgrid(*(2 * np.pi * np.fft.fftfreq(24),) * 2, indexing="ij")
    phi = torch.tensor(np.exp(-0.5 * 1.6**2 * (u**2 + v**2)))

    def convolved(x: np.ndarray, spectrum: torch.Tensor) -> np.ndarray:
        middle = len(x) // 2
        kernel = np.roll(np.fft.ifft2(spectrum.double().numpy()), (middle, middle), (0, 1))
        parts = [ndimage.convolve(x, part, mode="wrap") for part in (kernel.real, kernel.imag)]
        return parts[0] + 1j * parts[1]

    assert found[0, 0].numpy() == pytest.approx(convolved(padded, phi).real[6:-4:4, 6:-4:4], abs=1e-5)
    first = np.abs(convolved(padded, made.psi[0, 1]))
    assert found[0, 1 + 1].numpy() == pytest.approx(convolved(first, phi).real[6:-4:4, 6:-4:4], abs=1e-5)
    second = np.abs(convolved(first, made.psi[1, 2]))
    smooth = convolved(second, phi).real[6:-4:4, 6:-4:4]  # the engine smooths every second sample
    assert found[0, 1 + 4 + 4 + 2].numpy() == pytest.approx(smooth, abs=0.03 * smooth.max())


def test_scattering_sees_one_image_and_no_constant() -> None:
    made = Scattering2D()
    images = torch.rand(3, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    assert made.channels == 81
    assert torch.allclose(made(images)[1:2], made(images[1:2]), atol=1e-6)
    assert made(torch.ones(1, 1, 28, 28))[:, 1:].abs().max() < 1e-4
    assert not list(made.parameters())
    with raises_code("data.scattering-shape"):
        Scattering2D((7, 28))
    with raises_code("data.scattering-shape"):
        made(torch.zeros(1, 1, 28, 30))


def test_every_plane_is_scattered_by_itself_and_any_side_is_padded_by_its_reflection() -> None:
    images = torch.rand(2, 3, 13, 18, generator=torch.Generator().manual_seed(2))
    found = Scattering2D((13, 18))(images)
    assert found.shape == (2, 3 * 81, 4, 5)
    alone = [Scattering2D((13, 18))(images[:, i : i + 1]) for i in range(3)]
    torch.testing.assert_close(found, torch.cat(alone, 1))
    padded = np.pad(images[1, 2].double().numpy(), ((5, 6), (5, 5)), mode="reflect")
    u, v = np.meshgrid(*(2 * np.pi * np.fft.fftfreq(side) for side in padded.shape), indexing="ij")
    smooth = np.fft.ifft2(np.fft.fft2(padded) * np.exp(-0.5 * 1.6**2 * (u**2 + v**2))).real[6:-4:4, 6:-4:4]
    assert found[1, 2 * 81].numpy() == pytest.approx(smooth, abs=1e-5)


def test_distorted_images_are_other_drawings_each_by_itself() -> None:
    images = torch.zeros(6, 1, 28, 28)
    images[:, :, 6:22, 12:16] = 1.0

    def drawn(x: torch.Tensor) -> torch.Tensor:
        return distorted(x, torch.Generator().manual_seed(3))

    found = drawn(images)
    assert found.shape == images.shape
    assert float(found.min()) >= 0.0
    assert float(found.max()) <= 1.0
    assert torch.equal(found, drawn(images))
    assert len({float(image.sum()) for image in found}) == 6
    assert 0.3 < float(found.sum() / images.sum()) < 3.0
    other = images.clone()
    other[0] = 0.0
    assert torch.equal(drawn(other)[1:], found[1:])


def test_a_small_cnn_learns_on_public_images_and_gives_codes_of_each_by_itself() -> None:
    torch.manual_seed(0)
    model, generator = ImageCNN(classes=2), torch.Generator().manual_seed(1)
    label = torch.arange(64) % 2
    images = torch.zeros(64, 1, 28, 28)
    images[label == 0, :, 6:22, 12:16] = 1.0
    images[label == 1, :, 12:16, 6:22] = 1.0
    x = distorted(images, generator)

    def losses(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(output, y, reduction="none")

    lamina.pretrain(model, losses, x, label, proxy="public: bars", steps=15, batch=32)
    model.eval()
    with torch.no_grad():
        codes = model.codes(x)
        assert codes.shape == (64, 576)
        torch.testing.assert_close(model.codes(x[:1]), codes[:1], rtol=1e-4, atol=1e-5)
        assert float((model(distorted(images, generator)).argmax(1) == label).double().mean()) > 0.9
