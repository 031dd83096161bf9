"""The types a fleet is described with, and what is generated from them: see `router.spec.fleet`."""
