"""What a graph says: flow, label maps, links between dimensions, experts, norms, masks, outlining."""
