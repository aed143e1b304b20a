"""Where DTensors meet torch: functions that ask no subclass, modules, optimizers, state dicts, DTensors of torch."""
