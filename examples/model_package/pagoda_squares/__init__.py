"""A model that Pagoda learns from an installed package."""
