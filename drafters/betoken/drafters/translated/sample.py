"""Text on which tokenizers are compared: prose, code, data and dialogue, in several scripts."""

SAMPLE = """\
The committee met on Tuesday, 14 March 2023, and approved the budget for the following year. Although several members \
objected, the proposal passed by a large majority; its author said that she had "expected nothing else". Further \
questions about costs, schedules and responsibilities will be answered before the end of the month.

def moving_average(values: list[float], window: int = 5) -> list[float]:
    # Return the mean of every `window` neighbouring values.
    if window <= 0:
        raise ValueError(f"window must be positive, not {window}")
    sums = [sum(values[i : i + window]) for i in range(len(values) - window + 1)]
    return [total / window for total in sums]

int main(void) {
    const char *names[] = {"alpha", "beta", NULL};
    for (int i = 0; names[i] != NULL; i++) { printf("%d: %s\\n", i, names[i]); }
    return 0;
}

{"id": 1024, "name": "Widget", "price": 19.99, "tags": ["new", "sale"], "in_stock": true, "weight": null}

SELECT customer_id, COUNT(*) AS orders FROM purchases WHERE total > 100 GROUP BY customer_id ORDER BY orders DESC;

Q: How do I install the package? A: Run `make install` in its folder and restart the server; see https://example.com/docs.
Let x = 3.14159. Then sin(x) is about 2.65e-06, and x ** 2 + 1 = 10.8696.

Der Zug nach München fährt um 8 Uhr ab. Le café était fermé hier soir. El niño come una manzana.
Москва — столица России. \
今天天气很好。
"""
