"""Mixture of experts: who a token goes to, how it gets there, what an expert does with it."""
