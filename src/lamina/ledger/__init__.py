"""What was admitted, spent, withdrawn and released: an append-only, signed record that an auditor can check."""
