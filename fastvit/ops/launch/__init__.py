"""What launches the Triton kernels of fastvit.kernels; imported when a kernel is first wanted."""
