"""Pure code: values in, values out. No I/O, clock, thread, TensorStore or device."""
