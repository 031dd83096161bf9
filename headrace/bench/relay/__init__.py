"""`headrace bench relay`: streamed answers through headrace, and through what else can stand in its place."""
