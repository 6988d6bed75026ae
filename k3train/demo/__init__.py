"""Small demonstrations that need no model: numpy and a picture."""
