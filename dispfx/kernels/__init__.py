"""Operations that a GPU runs better than what a compiler makes of the graph, each with its reference."""
