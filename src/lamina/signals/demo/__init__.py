"""The demo: simulated patients, hospitals that sign, and trainings with and without privacy."""
