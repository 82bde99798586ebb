"""States of rows as bytes in host memory, and the folder that they outlive the process in."""
