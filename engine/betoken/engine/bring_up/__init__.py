"""The steps of a model between loading and serving."""
