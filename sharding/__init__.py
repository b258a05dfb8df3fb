"""Device meshes, and how arrays are sharded over them. This package knows nothing about models, files or flags."""
