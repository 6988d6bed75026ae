"""Configuration: the schema (the only list of keys), composition by Hydra, and Hugging Face config files."""
