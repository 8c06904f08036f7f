"""Read a graph (calls, values, views, layouts), and change it by the one class that does so, `GraphRewriter`."""
