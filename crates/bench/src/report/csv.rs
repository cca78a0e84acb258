//! The figures as CSV (RFC 4180).
use crate::Row;
use std::fmt::Write;

/// A line for each figure.
pub(super) fn figures(rows: &[Row]) -> String {
    let mut out =
        "bench,case,subject,metric,unit,median,min,max,rounds,method,pinned_cpu,load_start,load_end\r\n"
            .to_owned();
    for row in rows {
        let cpu = row.pinned_cpu.map(|cpu| cpu.to_string()).unwrap_or_default();
        let [start, end] = row.load.map(|load| load.map(|load| load.to_string()).unwrap_or_default());
        let _ = write!(
            out,
            "{},{},{},{},{},{},{cpu},{start},{end}\r\n",
            name(row),
            row.median,
            row.min,
            row.max,
            row.rounds,
            field(&row.method),
        );
    }
    out
}

/// A line for each round of each figure.
pub(super) fn rounds(rows: &[Row]) -> String {
    let mut out = "bench,case,subject,metric,unit,round,value\r\n".to_owned();
    for row in rows {
        for (round, value) in row.values.iter().enumerate() {
            let _ = write!(out, "{},{},{value}\r\n", name(row), round + 1);
        }
    }
    out
}

/// The fields that name a figure.
fn name(row: &Row) -> String {
    [&row.bench, &row.case, &row.subject, &row.metric, &row.unit].map(|text| field(text)).join(",")
}

/// A field, quoted if it has to be.
fn field(text: &str) -> String {
    if text.contains([',', '"', '\r', '\n']) {
        format!("\"{}\"", text.replace('"', "\"\""))
    } else {
        text.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_quoted_and_counted() {
        let rows = crate::published::dma_barrier::rows();
        let figures = figures(&rows);
        let mut lines = figures.split_terminator("\r\n");
        assert_eq!(lines.next().map(|line| line.split(',').count()), Some(13));
        let first = lines.next().unwrap();
        assert!(
            first.starts_with("barrier,dma-barrier-2012/tcp_stream,published/host,rate,10^6bit/s,923.255,"),
            "{first}"
        );
        assert!(first.ends_with(",4,\"published May 2012, netperf\",,,"), "{first}");
        assert_eq!(lines.count(), rows.len() - 1);
        assert_eq!(rounds(&rows).lines().count(), 1 + 4 * 4 + 3 * 3);
        assert_eq!(field("a\"b"), "\"a\"\"b\"");
    }
}
