"""Where DTensors meet torch: functions that ask no subclass, transforms, state dicts, replicas, DTensors of torch."""
