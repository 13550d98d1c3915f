"""The policy in force: what a contribution may have signed when it was admitted, and how the policy may change."""

from __future__ import annotations

from lamina.ledger.check.keys import Keys
from lamina.ledger.check.problem import bad
from lamina.ledger.depth import deeper
from lamina.ledger.leaf import Leaf
from lamina.ledger.records import Header, PolicyChange, Preset, Role, Terms, loosened, misplaced


class PolicyInForce:
    """Floors and presets after the leaves that were read. `version` changes with them."""

    def __init__(self, header: Header) -> None:
        self._origin = header.origin
        self.floors, self.presets = header.floors, {each.cls: each for each in header.presets}
        self.version = 0
        self._last: Header | PolicyChange = header
        self._since: list[tuple[int, dict[str, Preset]]] = [(0, self.presets)]
        self._named = {each.id for each in header.keys}
        self.alone: list[
            int
        ] = []  # changes that protect less, signed by somebody whom the ledger named later itself

    @classmethod
    def of(cls, header: Header, last: Header | PolicyChange) -> PolicyInForce:
        """Where only the last word counts: for who admits."""
        made = cls(header)
        made.floors, made.presets = last.floors, {each.cls: each for each in last.presets}
        made._since = [(0, made.presets)]
        return made

    def change(self, leaf: Leaf, keys: Keys) -> None:
        """Go on by one policy change: floors only up, unless two signed."""
        new = leaf.record
        assert isinstance(new, PolicyChange)
        names = [each.cls for each in new.presets]
        if len(set(names)) < len(names):
            bad(leaf.seq, PolicyChange, "verify.class-named-twice", "a class is named twice")
        signers, wrong = keys.signers(
            new.message(self._origin), new.signatures, (Role.LEDGER, Role.AUDITOR), leaf.time
        )
        if wrong is not None:
            bad(
                leaf.seq,
                PolicyChange,
                "verify.signature-under-not",
                f"a signature under it does not count: {wrong}",
            )
        looser = loosened(self.floors, self.presets.values(), new.floors, new.presets)
        if looser and len(signers) < 2:
            bad(
                leaf.seq,
                PolicyChange,
                "verify.two-parties-signed",
                f"{looser[0]}, and {len(signers)} of two parties signed that",
            )
        if (misfit := misplaced(new, self._last)) is not None:
            bad(leaf.seq, PolicyChange, "verify.change", misfit)
        if looser and len(signers & self._named) < 2:
            self.alone.append(leaf.seq)
        self.floors, self.presets = new.floors, {each.cls: each for each in new.presets}
        self.version += 1
        self._last = new
        self._since.append((leaf.seq, self.presets))

    def promised(self, cls: str, leaf: int) -> int:
        """The least noise multiplier that a class was promised after so many leaves, or later; 0 if none was.

        A segment is charged when it is opened, and what was promised then holds for it to its end.
        """
        found = [presets.get(cls) for presets in self._from(leaf)]
        return min(0 if each is None else each.noise_multiplier for each in found)

    def presets_since(self, cls: str, leaf: int) -> list[Preset]:
        """What a class was after so many leaves, and later: a run keeps the plan that it began with."""
        return [presets[cls] for presets in self._from(leaf) if cls in presets]

    def _from(self, leaf: int) -> list[dict[str, Preset]]:
        first = sum(seq < leaf for seq, _ in self._since) - 1
        return [presets for _, presets in self._since[max(first, 0) :]]

    def wrong(self, terms: Terms) -> str | None:
        """Why a contribution with these terms was not to be admitted; None if it was."""
        preset = self.presets.get(terms.cls)
        if preset is None:
            return f"class {terms.cls!r} is not one of the policy"
        if preset.public:
            if terms.clip_norm or terms.noise_multiplier:
                return f"class {terms.cls!r} is public, and it signed a bound, which nobody keeps there"
        elif (problem := self._bound(terms, preset)) is not None:
            return problem
        if terms.profile is not None and terms.profile != preset.profile:
            return deeper(preset.profile, terms.profile)
        return None

    def _bound(self, terms: Terms, preset: Preset) -> str | None:
        c, z = terms.clip_norm, terms.noise_multiplier
        if not z:
            return f"class {terms.cls!r} is private, and it signed no bound"
        if c < self.floors.clip_norm:
            return f"clip norm {_plain(c)} is below the floor of {_plain(self.floors.clip_norm)}"
        if z < self.floors.noise_multiplier:
            return (
                f"noise multiplier {_plain(z)} is below the floor of {_plain(self.floors.noise_multiplier)}"
            )
        if c > preset.clip_norm:
            return f"clip norm {_plain(c)} is above the {_plain(preset.clip_norm)} of class {terms.cls!r}"
        if z < preset.noise_multiplier:
            return f"noise multiplier {_plain(z)} is below the {_plain(preset.noise_multiplier)} of class {terms.cls!r}"
        return None


def _plain(micro: int) -> str:
    return f"{micro / 1e6:.9g}"
