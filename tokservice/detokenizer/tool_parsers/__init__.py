"""The ways in which models write tool calls; each file reads one of them."""
