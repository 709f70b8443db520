"""A model whose layers are shared by several processes, the ranks, with the same bits for every number of them."""
