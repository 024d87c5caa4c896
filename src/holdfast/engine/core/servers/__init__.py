"""Decides where rows of tables are, how far each server is, and whom to ask for rows."""
