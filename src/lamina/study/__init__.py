"""The experiments of the LSAB-zCDP document, measured again: one command for its tables and figures."""
