"""Displays for people: layouts, canvases in the terminal, and pages in the browser."""
