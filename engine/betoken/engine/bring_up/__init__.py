"""What happens to a model between loading and serving."""
