"""What keeps a server alive: memory below a watermark, a thread that computes, an end in order."""
