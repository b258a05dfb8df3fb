"""Two checkouts of the project beside one another: times of the same generations, taken in turns."""
