"""Weights that leave the house: tensor names, Hugging Face folders in and out, MXFP4 after training."""
