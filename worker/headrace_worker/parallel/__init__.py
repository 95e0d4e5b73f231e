"""One replica over several ranks: who computes what with whom."""
