"""Weights that inference engines load once: what the loaders for vLLM and SGLang have in common."""
