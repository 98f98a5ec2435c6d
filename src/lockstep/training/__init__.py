"""What happens between `world.prepare` and the optimizer's step."""
