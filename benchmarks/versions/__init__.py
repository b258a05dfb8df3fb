"""Compare two checkouts of the project: times of the same generations, taking turns."""
