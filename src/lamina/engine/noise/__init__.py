"""The noise of a step: streams, draws, and the mechanisms that are made of them."""
