"""Twelve leads from a dipole: against the published coefficients of the leads that we derive."""

from __future__ import annotations

import numpy as np

from lamina.signals.heart_model import LEADS, eight_leads, twelve_leads

PUBLISHED = {  # Dower's coefficients of the four leads that the code gets from I and II
    "III": (-0.397, 1.301, -0.191),
    "aVR": (-0.434, -0.415, 0.037),
    "aVL": (0.515, -0.768, 0.125),
    "aVF": (-0.081, 1.184, -0.162),
}


def test_derived_leads_have_the_published_coefficients() -> None:
    coefficients = twelve_leads(eight_leads(np.eye(3)))
    assert coefficients.shape == (12, 3)
    for name, row in PUBLISHED.items():
        assert np.allclose(coefficients[LEADS.index(name)], row, atol=1.5e-3)  # three published digits


def test_leads_see_the_heart_from_where_they_sit() -> None:
    left, feet, back = twelve_leads(eight_leads(np.eye(3))).T
    assert LEADS[int(np.argmax(left))] == "V4"
    assert LEADS[int(np.argmax(feet))] == "III"
    assert LEADS[int(np.argmin(back))] == "V2"  # in front of the heart: forces to the back are negative
