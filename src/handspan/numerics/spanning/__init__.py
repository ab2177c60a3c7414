"""The parts of the method span: records, schedule, what clients do, what the server decides."""
