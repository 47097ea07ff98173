"""Models: functions of (params, buffers, tokens), and weights in and out."""
