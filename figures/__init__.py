"""Figures: each script reads records and draws; nothing is computed anew."""
