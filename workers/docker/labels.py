"""Labels that we put on containers and images, by which we find our own again. Each value is text."""

# On every container.
FLEET = "swerve.fleet"  # containers of other fleets on the same Docker host are left alone
RUN = "swerve.run"
REQUEST = "swerve.request"
ATTEMPT = "swerve.attempt"
LEASE = "swerve.lease"  # the Redis key that holds the lease
WORKER = "swerve.worker"
ROLE = "swerve.role"
DEADLINE = "swerve.deadline"  # Unix seconds; the container ends by itself then

# On every image that was made for agents out of a task's image.
AGENT_IMAGE = "swerve.agent-image"  # "1"
SOURCE = "swerve.source"  # name of the task's image
