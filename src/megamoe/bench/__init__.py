"""`megamoe bench`: cases and their work (cases), timing on the device (timing), a run of several
processes (run), and what is handed over (report).
"""
