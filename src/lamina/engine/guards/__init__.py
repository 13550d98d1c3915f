"""Everything that is refused around a step."""
