"""Plans: budget, count of parameters, hardening, latency table."""
