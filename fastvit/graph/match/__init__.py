"""How a graph is read: calls, values, views, layouts, and the one way to change it."""
