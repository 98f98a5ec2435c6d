"""The strategy `pipeline`: a model cut into stages, each on a rank of its own."""
