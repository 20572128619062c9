"""The services of one machine as processes: started, watched, restarted. Imports no service."""
