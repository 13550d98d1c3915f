"""How the rules of a plan move C and S while it runs."""
