"""What commands show to people: layouts, canvases in the terminal, pages in the browser."""
