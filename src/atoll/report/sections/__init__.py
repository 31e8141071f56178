"""The sections of a page: each collects its values from a comparison; an empty one is left out."""
