"""The page at `/`: the cluster at a glance, one self-contained file."""
