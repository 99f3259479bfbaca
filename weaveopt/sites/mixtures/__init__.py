"""Mixtures of experts as graphs hold them: their forms, their activations, what chose the experts."""
