"""What Swerve stands on: services, images, serving processes. It is run, never imported by the other
packages.
"""
