"""From losses to released gradients: per-contribution gradients, clipping, executors, placements."""
