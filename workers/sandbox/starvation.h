/* Measures the time for which the machine had no CPU for the container's processes. */
#include <stdint.h>

/* Seconds of the monotonic clock. */
double now(void);

/* CPU time of the container in nanoseconds. */
unsigned long long cpu_ns(void);

/* Call this when a command begins. */
void begin_looking(void);

/* Looks at the CPU times of the machine and the container, if the last look was longer ago than `pause_s`. */
void look(double pause_s);

/* Time since begin_looking in which a process of the container wanted to run and the machine had no CPU for it. */
uint32_t starved_ms(void);
