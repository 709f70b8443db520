"""A drafter's layers beside a target model: their own forward over their own KV pages."""
